(** * A lower bound: certifying one patch means covering two

    A defense looks at the labels under a fixed family of masks, and certifies an image whenever they agree. Then for
    every two placements some member hides both. The defense may be any function of the classifier and the image; the
    classifiers are the weakest: they see a filled image and nothing else. *)

From Coq Require Import List Bool Arith Lia.
From PatchCleanser Require Import Images SourceGrid.
Import ListNotations.

Section LowerBound.
  Context {pixel value : Type}.
  Variable pixels : list pixel.
  Variable same : value -> value -> bool.
  Hypothesis same_iff : forall a b, same a b = true <-> a = b.

  (** Three values are enough: the masks' fill and two others. *)
  Variables fill light dark : value.
  Hypothesis light_is_visible : light <> fill.
  Hypothesis dark_is_visible : dark <> fill.
  Hypothesis light_is_not_dark : light <> dark.

  Variable family : list (region pixel).
  Variable R : threat pixel.
  Hypothesis patches_lie_in_the_image : forall P p, R P -> P p = true -> In p pixels.

  Definition classifier := image pixel value -> label.

  Definition is_a_function (F : classifier) : Prop := forall x x', (forall p, x p = x' p) -> F x = F x'.

  Definition masked (m : region pixel) (x : image pixel value) : image pixel value := fill_in (fun _ => fill) m x.

  Definition unanimous_under_the_family (F : classifier) (x : image pixel value) (y : label) : Prop :=
    forall m, In m family -> F (masked m x) = y.

  Definition certifies_by_unanimity (defense : classifier -> image pixel value -> label) : Prop :=
    forall F, is_a_function F -> forall x y, unanimous_under_the_family F x y ->
    forall x', attacked R x x' -> defense F x' = y.

  (** The classifier of the proof: 0 for image x under any member of the family, 1 for all others. *)
  Definition looks_like (g h : image pixel value) : bool := forallb (fun p => same (g p) (h p)) pixels.

  Definition only (x : image pixel value) : classifier :=
    fun g => if existsb (fun m => looks_like g (masked m x)) family then 0 else 1.

  Lemma only_is_a_function : forall x, is_a_function (only x).
  Proof.
    intros x g h Hsame. unfold only.
    replace (existsb (fun m => looks_like g (masked m x)) family)
      with (existsb (fun m => looks_like h (masked m x)) family); [reflexivity|].
    induction family as [|m rest IH]; simpl; [reflexivity|]. rewrite IH. f_equal. unfold looks_like.
    clear -Hsame. induction pixels as [|p rest IH]; simpl; [reflexivity|]. now rewrite Hsame, IH.
  Qed.

  Lemma looks_like_iff : forall g h, looks_like g h = true <-> forall p, In p pixels -> g p = h p.
  Proof.
    intros g h. unfold looks_like. rewrite forallb_forall. split; intros H p Hp; now apply same_iff, H.
  Qed.

  Theorem certifying_one_patch_means_covering_two : forall defense,
    certifies_by_unanimity defense ->
    forall P Q, R P -> R Q -> exists m, In m family /\ hides m P /\ hides m Q.
  Proof.
    intros defense Hsound P Q HP HQ.
    destruct (existsb (fun m => forallb (fun p => implb (P p || Q p) (m p)) pixels) family) eqn:E.
    { apply existsb_exists in E. destruct E as [m [Hm Hhides]]. rewrite forallb_forall in Hhides.
      exists m. split; [assumption|]. split; intros p Hp.
      - specialize (Hhides p (patches_lie_in_the_image P p HP Hp)). now rewrite Hp in Hhides.
      - specialize (Hhides p (patches_lie_in_the_image Q p HQ Hp)). now rewrite Hp, orb_true_r in Hhides. }
    (* No member hides both. Two images differ just on P and Q, and one image is an attack on both. *)
    exfalso.
    set (x := fun p => if P p then light else dark).
    set (x' := fun p => if P p then dark else if Q p then light else dark).
    set (z := fun _ : pixel => dark).
    assert (Hx : attacked R x z) by (exists P; split; [assumption|]; intros p Hp; unfold x, z; now rewrite Hp).
    assert (Hx' : attacked R x' z).
    { exists Q. split; [assumption|]. intros p Hp. unfold x', z. rewrite Hp. now destruct (P p). }
    assert (Hdiffer : forall p, P p || Q p = true -> x p <> x' p).
    { intros p Hp. unfold x, x'. destruct (P p), (Q p); try discriminate; auto. }
    assert (Hvisible : forall p, x p <> fill /\ x' p <> fill).
    { intro p. unfold x, x'. destruct (P p), (Q p); auto. }
    assert (Hlabel : unanimous_under_the_family (only x) x 0).
    { intros m Hm. unfold only. replace (existsb _ family) with true; [reflexivity|].
      symmetry. apply existsb_exists. exists m. split; [assumption|]. now apply looks_like_iff. }
    assert (Hlabel' : unanimous_under_the_family (only x) x' 1).
    { intros m Hm. unfold only.
      destruct (existsb (fun m2 => looks_like _ (masked m2 x)) family) eqn:Hex; [|reflexivity].
      exfalso. apply existsb_exists in Hex. destruct Hex as [m2 [_ Hsame]]. rewrite looks_like_iff in Hsame.
      (* Some pixel of P or Q is visible under m; the fill shows that m2 leaves it visible, too. *)
      assert (Hpixel : exists p, P p || Q p = true /\ m p = false).
      { apply not_true_iff_false in E. destruct (forallb (fun p => implb (P p || Q p) (m p)) pixels) eqn:Hall.
        - exfalso. apply E, existsb_exists. eauto.
        - clear -Hall. induction pixels as [|p rest IH]; [discriminate|]. simpl in Hall.
          destruct (P p || Q p) eqn:Hp, (m p) eqn:Hm; simpl in Hall; eauto. }
      destruct Hpixel as [p [Hp Hmp]]. assert (Hin : In p pixels).
      { apply orb_true_iff in Hp. destruct Hp; eauto using patches_lie_in_the_image. }
      specialize (Hsame p Hin). unfold masked, fill_in in Hsame. rewrite Hmp in Hsame.
      destruct (Hvisible p) as [_ Hfill]. destruct (m2 p); [now apply Hfill|]. apply (Hdiffer p Hp). auto. }
    assert (H0 := Hsound (only x) (only_is_a_function x) x 0 Hlabel z Hx).
    assert (H1 := Hsound (only x) (only_is_a_function x) x' 1 Hlabel' z Hx').
    congruence.
  Qed.
End LowerBound.
