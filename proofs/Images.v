(** * Images, masks, patches and the answers of a classifier

    The words of all other files. Pixels, their values and the answers of a classifier are of any type, so one proof
    holds for images of every size, for any fill colour, and for feature maps as well. *)

From Coq Require Import List Bool Arith Lia.
Import ListNotations.

Notation label := nat (only parsing).

Section Images.
  Context {pixel value answer : Type}.

  Definition image := pixel -> value.

  (** A set of pixels: those that a mask hides, or those of a patch. *)
  Definition region := pixel -> bool.

  Definition union (first second : region) : region := fun p => first p || second p.

  Definition hides (mask patch : region) : Prop := forall p, patch p = true -> mask p = true.

  (** The patches an attacker may use. Several patches at once are one region. *)
  Definition threat := region -> Prop.

  Definition attacked (R : threat) (x x' : image) : Prop :=
    exists patch, R patch /\ forall p, patch p = false -> x' p = x p.

  (** ** Mask sets and the answers under them *)

  Variable masks : list region.

  Definition mask (i : nat) : region := nth i masks (fun _ => false).

  (** The paper's R-covering. *)
  Definition covers (R : threat) : Prop :=
    forall patch, R patch -> exists i, i < length masks /\ hides (mask i) patch.

  (** The answers for one image: under masks i and j together, and under mask i alone where i = j. *)
  Definition table := nat -> nat -> answer.

  Variable labels : image -> table.

  (** What is assumed of them: two masks commute, and an answer is a function of which masks these are and of the pixels
      that both leave visible. So a transformer may drop hidden tokens, and two unions that hide the same pixels may
      have different answers, as where they lie in different rows of a batch. *)
  Definition two_masks_commute : Prop := forall x i j, labels x i j = labels x j i.

  Definition function_of_visible : Prop :=
    two_masks_commute /\
    (forall x x' i j, (forall p, mask i p = false -> mask j p = false -> x p = x' p) -> labels x i j = labels x' i j).

  Definition one_mask_labels (x : image) : list answer := map (fun i => labels x i i) (seq 0 (length masks)).

  Definition row_labels (x : image) (i : nat) : list answer := map (labels x i) (seq 0 (length masks)).

  Hypothesis visible : function_of_visible.

  Lemma hidden_patch_changes_no_answer : forall i j patch x x',
    hides (mask i) patch -> (forall p, patch p = false -> x' p = x p) -> labels x' i j = labels x i j.
  Proof.
    intros i j patch x x' Hhides Hsame. apply visible. intros p Hp _. apply Hsame.
    destruct (patch p) eqn:E; [|reflexivity]. apply Hhides in E. congruence.
  Qed.

  Lemma one_mask_label_number : forall x i d, i < length masks -> nth i (one_mask_labels x) d = labels x i i.
  Proof.
    intros x i d Hi. unfold one_mask_labels.
    rewrite nth_indep with (d' := labels x 0 0) by now rewrite map_length, seq_length.
    now rewrite map_nth with (f := fun i => labels x i i), seq_nth.
  Qed.

  Lemma every_mask_has_a_label : forall x i, i < length masks -> In (labels x i i) (one_mask_labels x).
  Proof. intros x i Hi. apply in_map with (f := fun i => labels x i i). apply in_seq. lia. Qed.

  Lemma one_mask_labels_are_of_masks : forall x l,
    In l (one_mask_labels x) -> exists i, i < length masks /\ l = labels x i i.
  Proof.
    intros x l H. apply in_map_iff in H. destruct H as [i [E Hi]]. apply in_seq in Hi.
    exists i. split; [lia | congruence].
  Qed.

  Lemma row_has_every_pair : forall x i j, j < length masks -> In (labels x i j) (row_labels x i).
  Proof. intros. apply in_map. apply in_seq. lia. Qed.

  Lemma row_has_only_pairs : forall x i l,
    In l (row_labels x i) -> exists j, j < length masks /\ l = labels x i j.
  Proof.
    intros x i l H. apply in_map_iff in H. destruct H as [j [E Hj]]. apply in_seq in Hj.
    exists j. split; [lia | congruence].
  Qed.
End Images.

(** ** A classifier that sees visible pixels only fills such a table *)
Section Classifier.
  Context {pixel value answer : Type}.
  Variable masks : list (@region pixel).

  Definition masked_classifier := @region pixel -> @image pixel value -> answer.

  Definition sees_visible_pixels_only (F : masked_classifier) : Prop :=
    forall mask mask' x x',
      (forall p, mask p = mask' p) -> (forall p, mask p = false -> x p = x' p) -> F mask x = F mask' x'.

  Definition table_of (F : masked_classifier) (x : @image pixel value) : @table answer :=
    fun i j => F (union (mask masks i) (mask masks j)) x.

  Lemma such_a_classifier_fills_a_table : forall F,
    sees_visible_pixels_only F -> function_of_visible masks (table_of F).
  Proof.
    intros F H. split; [intros x i j | intros]; apply H.
    - intro p. apply orb_comm.
    - reflexivity.
    - reflexivity.
    - intros p Hp. apply orb_false_iff in Hp. destruct Hp. auto.
  Qed.
End Classifier.

Arguments image : clear implicits.
Arguments region : clear implicits.
Arguments threat : clear implicits.
Arguments table : clear implicits.
Arguments masked_classifier : clear implicits.
