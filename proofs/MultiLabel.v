(** * Multi-label classifiers (core/multilabel.py)

    Each class has a table of decisions of its own, 1 for present and 0 for absent, and double-masking answers each class
    by itself. What is proved of a class at one placement bounds how many answers are right, wherever the patch is. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images RowCertificate DoubleMasking.
Import ListNotations.

Section MultiLabel.
  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  Variable decisions : nat -> image pixel value -> table label.
  Hypothesis visible : forall c, function_of_visible masks (decisions c).
  Variable majority : list label -> label.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Definition answer_for (c : nat) (x : image pixel value) : label :=
    answer_of_double_masking masks (decisions c) majority order x.

  (** Some mask that hides the patch has a row that is v throughout. *)
  Definition guaranteed (x : image pixel value) (patch : region pixel) (c : nat) (v : label) : Prop :=
    exists i, i < length masks /\ hides (mask masks i) patch /\ good masks (decisions c) x v i.

  Definition differs_inside (patch : region pixel) (x x' : image pixel value) : Prop :=
    forall p, patch p = false -> x' p = x p.

  (** The row certificate, where the threat is this one placement. *)
  Theorem a_guaranteed_class_keeps_its_answer : forall x patch c v,
    guaranteed x patch c v -> forall x', differs_inside patch x x' -> answer_for c x' = v.
  Proof.
    intros x patch c v Hg x' Hsame.
    apply (double_masking_keeps_the_label masks (decisions c) (visible c) (fun other => other = patch)
             majority order order_has_every_mask x v).
    - intros other ->. exact Hg.
    - exists patch. split; [reflexivity | exact Hsame].
  Qed.

  Theorem no_class_is_guaranteed_both_ways : forall x patch c v w,
    guaranteed x patch c v -> guaranteed x patch c w -> v = w.
  Proof.
    intros x patch c v w Hv Hw.
    rewrite <- (a_guaranteed_class_keeps_its_answer x patch c v Hv x) by (intro; reflexivity).
    now apply a_guaranteed_class_keeps_its_answer with (patch := patch) (x := x).
  Qed.

  (** ** Counts *)

  Variable classes : list nat.
  Variable truth : nat -> bool.

  Definition number (holds : nat -> bool) : nat := length (filter holds classes).

  Lemma fewer_hold : forall first second : nat -> bool,
    (forall c, first c = true -> second c = true) -> number first <= number second.
  Proof.
    intros first second H. unfold number. induction classes as [|c rest IH]; simpl; [lia|].
    destruct (first c) eqn:E; [rewrite (H c E); simpl; lia | destruct (second c); simpl; lia].
  Qed.

  Definition true_positives (x : image pixel value) : nat := number (fun c => truth c && (answer_for c x =? 1)).
  Definition false_positives (x : image pixel value) : nat := number (fun c => negb (truth c) && (answer_for c x =? 1)).

  Variable R : threat pixel.
  (** What the program computes: for each placement, classes whose right answer is guaranteed there. *)
  Variable right : region pixel -> nat -> bool.
  Variable x : image pixel value.
  Hypothesis right_is_guaranteed : forall patch c,
    R patch -> right patch c = true -> guaranteed x patch c (if truth c then 1 else 0).

  Theorem the_worst_placement_bounds_true_positives : forall least,
    (forall patch, R patch -> least <= number (fun c => truth c && right patch c)) ->
    forall x', attacked R x x' -> least <= true_positives x'.
  Proof.
    intros least Hleast x' [patch [HR Hsame]].
    eapply Nat.le_trans; [apply (Hleast patch HR)|]. apply fewer_hold. intros c H.
    apply andb_true_iff in H. destruct H as [Ht Hr]. apply andb_true_iff. split; [assumption|].
    pose proof (right_is_guaranteed patch c HR Hr) as Hg. rewrite Ht in Hg.
    rewrite (a_guaranteed_class_keeps_its_answer x patch c 1 Hg x' Hsame). reflexivity.
  Qed.

  Theorem the_worst_placement_bounds_false_positives : forall most,
    (forall patch, R patch -> number (fun c => negb (truth c) && negb (right patch c)) <= most) ->
    forall x', attacked R x x' -> false_positives x' <= most.
  Proof.
    intros most Hmost x' [patch [HR Hsame]].
    eapply Nat.le_trans; [|apply (Hmost patch HR)]. apply fewer_hold. intros c H.
    apply andb_true_iff in H. destruct H as [Ht Ha]. apply andb_true_iff. split; [assumption|].
    destruct (right patch c) eqn:Hr; [exfalso|reflexivity].
    pose proof (right_is_guaranteed patch c HR Hr) as Hg. apply negb_true_iff in Ht. rewrite Ht in Hg.
    rewrite (a_guaranteed_class_keeps_its_answer x patch c 0 Hg x' Hsame) in Ha. discriminate.
  Qed.
End MultiLabel.

(** Precision TP / (TP + FP) is no smaller with more true and fewer false positives; both sides were multiplied out. *)
Theorem precision_is_monotone : forall least most tp fp,
  least <= tp -> fp <= most -> least * (tp + fp) <= tp * (least + most).
Proof. intros. nia. Qed.
